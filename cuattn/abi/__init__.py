"""The one definition of every struct and enum that Python and CUDA share."""
