"""Emulate a CUDA device on a CPU, so that the code paths of a GPU run compute real numbers.

Much of training depends on whether there is a GPU: kernels, precision, copies and random numbers. Without a GPU, these
code paths do not run. These tests run them, from the command line to the report, for every kind of run, and check each
operation:

    bash scripts/test.sh cuda_emulated

`runtime.cpp` (compiled in three seconds and cached) gives torch's core a CUDA device with one stream. `tensor.py`
defines a tensor on `cuda:0` that contains a CPU tensor, with which each operation is computed. `answers.py` makes
`torch.cuda` report an H100, replaces NCCL by gloo, and replaces torch's packed attention by tests/flash_stand_ins.
Autograd, megatron-core and swiftlite are not replaced, and run the code that they run on a GPU. `record.py` records the
following events, with the line of swiftlite that caused them:

    mixed         tensors of both devices in one operation, as CUDA refuses it (raised here too)
    generator     a CPU generator asked for random numbers of the device (raised here too)
    wait          the host needs a value that the device may not have computed yet: the queue runs dry
    unpinned      a copy to the device from memory that is not pinned: the host waits for all that is queued
    float64       64 or more numbers in double precision: a consumer's GPU computes them 32 to 64 times slower
    launch        an operation that would be a kernel

`worker.py` runs commands in one process, on the emulated device or on the CPU; `kinds.py` lists them. test_kinds.py
compares both devices and checks the counts; test_detectors.py tests each detector.

The following is not emulated: streams (all operations run in order, immediately), NCCL, the kernels of
scaled_dot_product_attention and their rounding, inductor (a compiled function runs uncompiled and counts as one kernel
per direction), CUDA's allocator and memory use, torch's profiler, and speed. Tests on a GPU (scripts/gpu.sh) are still
necessary.

The emulation cannot be removed from a process. transformers' models compute wrong results in it, so expected results
come from another process.
"""
