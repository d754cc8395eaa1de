"""The small operations of a layer as compiled kernels: attention, norm, SwiGLU.

torch has matrix products; what lies between them is many small operations, each with its own call
and its own pass over memory, and its attention sums in an order that depends on how many rows are
computed together. These kernels are compiled by numba on the user's machine, once, into the user
cache. Each row of a result is computed by one fixed sequence of float32 operations that depends on
nothing but the row and what it sees, so rows are exact by construction (design: "lossless").

========================  =====================================================================
:mod:`.compiler`          how a function becomes a kernel, where compiled ones are kept, threads
:mod:`.vector`            sixteen float32 lanes as a value; loads and stores of both precisions
:mod:`.attention`         rotation, cache writes and attention of all rows of a pass
:mod:`.norm`              root-mean-square normalisation
:mod:`.mlp`               SwiGLU
:mod:`.warmup`            all of them compiled before the first token
========================  =====================================================================

Called by :mod:`outrider.models.layers`; each kernel has a plain twin in torch that tests hold it
against.
"""
