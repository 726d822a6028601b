// A C++ program that computes attention and its gradients with the kernels of cuattn: the CUDA
// driver and three generated headers, no toolkit, no Python. 10_own_runtime.py makes the headers,
// builds this and checks what it writes:
//
//   c++ -std=c++20 -I <folder> 10_own_runtime.cpp -o own_runtime -ldl && ./own_runtime <folder>
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#include "cuattn_backward.h"
#include "cuattn_forward.h"

// The driver API, from cuda.h, without that file.
using Address = std::uint64_t;
using Handle = void*;

static void* library = nullptr;

template <class... Types>
static void call(const char* name, Types... arguments) {
  auto function = reinterpret_cast<int (*)(Types...)>(dlsym(library, name));
  int status = function ? function(arguments...) : -1;
  if (status) {
    std::fprintf(stderr, "%s returned %d\n", name, status);
    std::exit(1);
  }
}

static Address allocate(std::size_t bytes) {
  Address address = 0;
  if (bytes) call("cuMemAlloc_v2", &address, bytes);
  return address;
}

static void* pointer(Address address) { return reinterpret_cast<void*>(address); }

static FILE* open(const std::string& path, const char* mode) {
  FILE* file = std::fopen(path.c_str(), mode);
  if (!file) {
    std::perror(path.c_str());
    std::exit(1);
  }
  return file;
}

static Address read(const std::string& path) {
  FILE* file = open(path, "rb");
  std::vector<char> bytes;
  char piece[4096];
  while (std::size_t count = std::fread(piece, 1, sizeof piece, file))
    bytes.insert(bytes.end(), piece, piece + count);
  std::fclose(file);
  Address address = allocate(bytes.size());
  call("cuMemcpyHtoD_v2", address, static_cast<const void*>(bytes.data()), bytes.size());
  return address;
}

static void write(const std::string& path, void* from, std::size_t count) {
  std::vector<char> bytes(count);
  call("cuMemcpyDtoH_v2", static_cast<void*>(bytes.data()), reinterpret_cast<Address>(from), count);
  FILE* file = open(path, "wb");
  std::fwrite(bytes.data(), 1, count, file);
  std::fclose(file);
}

// All kernels of a pass, in order, on the default stream.
template <std::size_t count, class Params>
static void launch(const std::string& folder, const std::array<cuattn::Launch, count>& launches,
                   Params& params) {
  void* arguments[] = {&params};
  for (const cuattn::Launch& each : launches) {
    Handle module = nullptr, function = nullptr;
    std::string path = folder + "/" + each.cubin;
    call("cuModuleLoad", &module, path.c_str());
    call("cuModuleGetFunction", &function, module, each.name);
    if (each.smem_bytes > 48 << 10)  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
      call("cuFuncSetAttribute", function, 8, static_cast<int>(each.smem_bytes));
    call("cuLaunchKernel", function, each.grid, 1u, 1u, each.block, 1u, 1u, each.smem_bytes,
         Handle{nullptr}, static_cast<void**>(arguments), static_cast<void**>(nullptr));
  }
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s <folder>\n", argv[0]);
    return 2;
  }
  std::string folder = argv[1];
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    std::puts("no CUDA driver");
    return 0;
  }
  int device = 0;
  Handle context = nullptr;
  call("cuInit", 0u);
  call("cuDeviceGet", &device, 0);
  call("cuDevicePrimaryCtxRetain", &context, device);
  call("cuCtxSetCurrent", context);

  // Sizes are in the parameters: elements of arrays in C order, for that is how these were
  // exported.
  cuattn::FwdParams forward = cuattn::forward::kParams;
  const cuattn::Shape& shape = forward.shape;
  auto of = [](auto... sizes) { return (static_cast<std::size_t>(sizes) * ...); };
  std::size_t of_out = of(cuattn::forward::kOutItemsize, shape.batch, forward.out.stride_batch);
  std::size_t of_queries = of(cuattn::forward::kItemsize, shape.batch, forward.q.stride_batch);
  std::size_t of_keys = of(cuattn::forward::kItemsize, shape.batch, forward.k.stride_batch);
  std::size_t of_values = of(cuattn::forward::kItemsize, shape.batch, forward.v.stride_batch);
  std::size_t of_rows =
      of(cuattn::forward::kLseItemsize, shape.batch, shape.num_heads_q, shape.seqlen_q);

  forward.q.data = pointer(read(folder + "/q.bin"));
  forward.k.data = pointer(read(folder + "/k.bin"));
  forward.v.data = pointer(read(folder + "/v.bin"));
  forward.out.data = pointer(allocate(of_out));
  forward.lse = pointer(allocate(of_rows));
  forward.part_out = pointer(allocate(cuattn::forward::kPartOutBytes));
  forward.part_lse = pointer(allocate(cuattn::forward::kPartLseBytes));
  launch(folder, cuattn::forward::kLaunches, forward);

  cuattn::BwdParams backward = cuattn::backward::kParams;
  backward.q.data = forward.q.data;
  backward.k.data = forward.k.data;
  backward.v.data = forward.v.data;
  backward.out.data = forward.out.data;
  backward.lse = forward.lse;
  backward.dout.data = pointer(read(folder + "/dout.bin"));
  backward.dq.data = pointer(allocate(of_queries));
  backward.dk.data = pointer(allocate(of_keys));
  backward.dv.data = pointer(allocate(of_values));
  backward.delta = pointer(allocate(cuattn::backward::kDeltaBytes));
  backward.dq_sum = pointer(allocate(cuattn::backward::kDqSumBytes));
  backward.dout_cast = pointer(allocate(cuattn::backward::kDoutCastBytes));
  launch(folder, cuattn::backward::kLaunches, backward);

  write(folder + "/out.bin", forward.out.data, of_out);
  write(folder + "/dq.bin", backward.dq.data, of_queries);
  write(folder + "/dk.bin", backward.dk.data, of_keys);
  write(folder + "/dv.bin", backward.dv.data, of_values);
  std::puts("computed");
}
