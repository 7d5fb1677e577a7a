"""An emulated CUDA device: the branches of a GPU run, on a CPU, with real numbers.

Half of what training does is decided by "is this a GPU": which kernels, which precision, what is copied and when, which
random numbers. Without a GPU none of it runs. This tier runs it, from the command line to the report, for every kind of
run, and looks at each operation on the way:

    bash scripts/test.sh cuda_emulated

How it works. `runtime.cpp` (compiled in three seconds and kept in a cache) gives torch's core a CUDA device with one
stream. `tensor.py` has a tensor whose device is `cuda:0`; it carries a tensor on the CPU, on which each operation is
computed. `answers.py` lets `torch.cuda` answer as an H100, NCCL be gloo, and torch's packed attention be
tests/flash_stand_ins. Autograd, megatron-core and swiftlite are the real ones, and take the branches that they take on
a GPU. `record.py` notes, with the line of ours that asked:

    mixed         tensors of both devices in one operation, as CUDA refuses it (raised here too)
    generator     a CPU generator asked for random numbers of the device (raised here too)
    wait          the host needs a value that the device may not have computed yet: the queue runs dry
    unpinned      a copy to the device from memory that is not pinned: the host waits for all that is queued
    float64       64 or more numbers in double precision: a consumer's GPU computes them 32 to 64 times slower
    launch        an operation that would be a kernel

`worker.py` runs commands in one process, on the emulated device or on the CPU; `kinds.py` lists them; test_kinds.py
compares both and holds the counts; test_detectors.py shows of each detector that it sees what it is for.

What is not seen: streams (all operations run in order, at once), NCCL, which kernel scaled_dot_product_attention takes
and how it rounds, inductor (a compiled function runs eagerly, and counts as one kernel in each direction), CUDA's
allocator and the memory a run takes, torch's profiler, speed. A run on a GPU remains necessary: scripts/gpu.sh.

An emulated process cannot stop being one, and transformers' models compute wrongly in it; what they say comes from
another process.
"""
