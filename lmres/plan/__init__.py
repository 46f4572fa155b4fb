"""plan: what a run would need on a machine that is not here.

The real compilers of TPUs and NVIDIA GPUs run without the hardware, so a step is compiled for the machine and the
answer is read off the result; nothing is executed and nothing is allocated.

``machines`` the published figures of each device; ``topology`` the devices of a machine, by name; ``lowering`` the
train step, a decoding step or a prefill with abstract arguments; ``hlo`` reads a compiled module, ``collectives``
what it sends, ``buffers`` what it holds and moves; ``roofline`` the bound; ``planning`` puts them together;
``estimate`` guesses without compiling, ``advice`` and ``search`` use that to find what fits; ``report`` prints.
``growth`` plans one step at ever larger sizes and keeps what it finds, ``growth_report`` makes tables and series of it.

May import: analysis (series to draw), generate, train, model, residual, flow, sharding; jax. Used by the command line.
"""
