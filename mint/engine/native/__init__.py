"""The decoder's pass in native code, for sampling on a CPU: `NativeDecoder`, or None where there is no compiler."""
