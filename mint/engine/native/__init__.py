"""The decoder's passes in native code, for sampling and training on a CPU, where there is a compiler."""
