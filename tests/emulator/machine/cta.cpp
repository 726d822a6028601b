#include "machine/cta.h"
#include <dlfcn.h>
#include <bit>
#include <cstdio>
#include <string_view>
#include "cuda/language.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Cta cta;

// With the layer, as includes are written.
std::string to_string(const Where& where) {
  const std::string file = where.file_name();
  const std::size_t name = file.rfind('/');
  const std::size_t layer = name == 0 || name == file.npos ? file.npos : file.rfind('/', name - 1);
  return file.substr(layer == file.npos ? 0 : layer + 1) + ":" + std::to_string(where.line());
}

void Cta::run(int num_threads, void (*body)(), Random& random) {
  num_threads_ = num_live_ = num_threads;
  body_ = body, random_ = &random;
  failure_.clear();
  stacks_.reserve(num_threads);
  threads_.resize(num_threads);
  for (Barrier& each : barriers_) each.waiting.clear(), each.said = false;
  const int num_warps = num_threads / kLanes;
  for (int warp = 0; warp < num_warps; ++warp) {
    ready_[warp] = ~0u, arrived_[warp] = 0, warps_[warp] = warp;
  }
  random.shuffle(warps_, num_warps);
  for (int i = 0; i < num_threads; ++i) {
    threads_[i].state = Thread::kReady;
    threads_[i].copies.clear();
    threads_[i].fiber.prepare(stacks_.bottom(i), begin_thread);
  }
  select(next_ready());
  switch_fiber(launcher_, self().fiber);
  if (!failure_.empty()) throw Failure{failure_};
}

void Cta::select(int thread) {
  current_ = thread;
  stack_ = reinterpret_cast<std::uintptr_t>(self().fiber.bottom);
  threadIdx.x = static_cast<unsigned>(thread);
}

void Cta::begin_thread() {
  fiber_begins(cta.launcher_);
  cta.body_();
  cta.end_thread();
}

void Cta::end_thread() {
  self().state = Thread::kDone;
  --num_live_;
  if (num_live_ == 0) switch_fiber(self().fiber, launcher_);
  release_if_complete(0);
  wait();
}

// Goes on with a thread that can run, which may be this one.
void Cta::wait() {
  const int next = next_ready();
  if (next < 0) fail("nobody can go on" + who_waits_where() + "\n  this thread");
  if (next == current_) return;
  Thread& from = self();
  select(next);
  switch_fiber(from.fiber, self().fiber);
}

void Cta::make_ready(int thread) {
  threads_[thread].state = Thread::kReady;
  ready_[thread / kLanes] |= 1u << thread % kLanes;
}

// The warps have an order, which chance changes now and then, so that one may run far ahead; the
// lanes of a warp take any. source: Burckhardt et al. 2010 (probabilistic concurrency testing).
int Cta::next_ready() {
  const int num_warps = num_threads_ / kLanes;
  if (random_->one_in(64)) random_->shuffle(warps_, num_warps);
  for (int i = 0; i < num_warps; ++i) {
    const int warp = warps_[i];
    if (ready_[warp] == 0) continue;
    const int turn = random_->below(kLanes);
    const int lane = (std::countr_zero(std::rotr(ready_[warp], turn)) + turn) % kLanes;
    ready_[warp] &= ~(1u << lane);
    return warp * kLanes + lane;
  }
  return -1;
}

void Cta::together(const WarpInstruction& instruction, void* operands, const Where& where) {
  Thread& mine = self();
  const int warp = current_ / kLanes;
  mine.instruction = &instruction, mine.operands = operands, mine.where = where;
  code_ = nullptr;
  arrived_[warp] |= 1u << current_ % kLanes;
  if (~arrived_[warp] != 0) {
    mine.state = Thread::kAtInstruction;
    wait();
    return;
  }
  arrived_[warp] = 0;
  void* all[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Thread& its = threads_[warp * kLanes + lane];
    if (its.instruction->perform != instruction.perform) {
      fail(std::string("executes ") + instruction.name + ", while lane " + std::to_string(lane) +
           " of its warp executes " + its.instruction->name + " at " + to_string(its.where) +
           ": all lanes must execute the same one");
    }
    all[lane] = its.operands;
  }
  instruction.perform(all);
  if (instruction.orders_memory) memory.shared().order(warp * kLanes, kLanes);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp * kLanes + lane != current_) make_ready(warp * kLanes + lane);
  }
}

bool Cta::barrier(int id, int expected, bool said, const Where& where) {
  Thread& mine = self();
  mine.where = where;
  code_ = nullptr;
  if (id < 0 || id >= kBarriers) fail("barrier " + std::to_string(id) + ": there are 0 to 15");
  if (expected < 0 || expected % kLanes != 0 || expected > num_threads_) {
    fail("barrier " + std::to_string(id) + " of " + std::to_string(expected) +
         " threads: no multiple of 32, or not as many as the CTA has");
  }
  Barrier& its = barriers_[id];
  mine.state = Thread::kAtBarrier;
  mine.barrier = id, mine.expected = expected;
  if (!its.waiting.empty() && threads_[its.waiting[0]].expected != expected) {
    fail("waits at barrier " + std::to_string(id) + " for another number of threads than thread " +
         std::to_string(its.waiting[0]));
  }
  if (its.waiting.empty()) its.said = false;
  its.waiting.push_back(current_);
  its.said |= said;
  release_if_complete(id);
  wait();
  return mine.said;
}

void Cta::release_if_complete(int id) {
  Barrier& its = barriers_[id];
  if (its.waiting.empty()) return;
  const int expected = threads_[its.waiting[0]].expected;
  const int count = static_cast<int>(its.waiting.size());
  if (count < (expected == 0 ? num_live_ : expected)) return;
  check_warps_agree(its);
  if (expected == 0) {
    memory.shared().order_all();
  } else {
    memory.shared().order(its.waiting.data(), count);
  }
  for (const int thread : its.waiting) threads_[thread].said = its.said, make_ready(thread);
  its.waiting.clear();
}

static bool is_same(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::string_view(a.file_name()) == b.file_name();
}

// __syncthreads is bar.sync.aligned: a warp executes it as one. barrier.sync need not be, but no
// kernel here divides a warp.
void Cta::check_warps_agree(const Barrier& barrier) {
  const Thread* first[kMaxThreads / kLanes] = {};
  for (const int thread : barrier.waiting) {
    const Thread*& of_warp = first[thread / kLanes];
    if (of_warp == nullptr) of_warp = &threads_[thread];
    if (!is_same(of_warp->where, threads_[thread].where)) {
      fail("barrier " + std::to_string(of_warp->barrier) + ": lanes of warp " +
           std::to_string(thread / kLanes) + " wait at it in " + to_string(of_warp->where) +
           " and " + to_string(threads_[thread].where));
    }
  }
}

bool Cta::is_special(const void* pointer) {
  const auto is = [=](const auto& its) {
    return reinterpret_cast<std::uintptr_t>(pointer) - reinterpret_cast<std::uintptr_t>(&its) <
           sizeof its;
  };
  return is(threadIdx) || is(blockIdx) || is(blockDim) || is(gridDim);
}

void Cta::fail(const std::string& what) {
  failure_ = "CTA " + std::to_string(blockIdx.x) + ", thread " + std::to_string(current_) + ": " +
             what + place();
  switch_fiber(self().fiber, launcher_);
  __builtin_unreachable();
}

// An address of a unit is one of its file; launch.py finds the line.
std::string Cta::place() const {
  if (code_ == nullptr) return ", at " + to_string(threads_[current_].where);
  Dl_info file;
  if (dladdr(code_, &file) == 0) return "";
  char text[32];
  std::snprintf(text, sizeof text, ", (code at %#zx)",
                static_cast<const char*>(code_) - static_cast<const char*>(file.dli_fbase) - 1);
  return text;
}

std::string Cta::who_waits_where() const {
  std::string text;
  const auto says = [&](int i) -> std::string {
    const Thread& its = threads_[i];
    if (its.state == Thread::kDone) return "ended";
    if (its.state == Thread::kAtInstruction) {
      return std::string("wait in ") + its.instruction->name + " at " + to_string(its.where);
    }
    const int count = its.expected == 0 ? num_live_ : its.expected;
    return "wait at barrier " + std::to_string(its.barrier) + " (" +
           std::to_string(barriers_[its.barrier].waiting.size()) + " of " + std::to_string(count) +
           " threads) at " + to_string(its.where);
  };
  for (int begin = 0, i = 1; i <= num_threads_; ++i) {
    if (i < num_threads_ && says(i) == says(begin)) continue;
    text +=
        "\n  threads " + std::to_string(begin) + " to " + std::to_string(i - 1) + " " + says(begin);
    begin = i;
  }
  return text;
}

}  // namespace emulator
