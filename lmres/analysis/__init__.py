"""analysis: what a residual connection does to the flow of information, measured and drawn.

``mixing`` records a transformer over a batch and gives the depth-mixing matrix with the proof that it is the right one;
``streams`` measures gains of composites, source entropies and stream similarities; ``figures`` draws the matrix, and
the loss curves of several runs, ``growth`` what a step needs at ever larger sizes, as SVG strings without any global
plotting state, in the style of ``drawing``.

    result = model_mixing(model, params, tokens)      # result.error is the proof
    Path("mixing.svg").write_text(mixing_figure(result))
    model_streams(model, params, tokens).gains        # the largest growth of signal and gradient, by depth

May import: ops, residual, model, jax, matplotlib. Knows nothing of training, data or files.
"""

from lmres.analysis.drawing import run_colours
from lmres.analysis.figures import Curve, loss_figure, mixing_figure
from lmres.analysis.growth import Growth, Panel, growth_figure
from lmres.analysis.mixing import MixingResult, model_mixing
from lmres.analysis.streams import (
    CompositeGains,
    SourceEntropy,
    StreamResult,
    Summary,
    composite_gains,
    model_streams,
    source_entropy,
    stream_similarity,
)

__all__ = [
    "CompositeGains",
    "Curve",
    "Growth",
    "MixingResult",
    "Panel",
    "SourceEntropy",
    "StreamResult",
    "Summary",
    "composite_gains",
    "growth_figure",
    "loss_figure",
    "mixing_figure",
    "model_mixing",
    "model_streams",
    "run_colours",
    "source_entropy",
    "stream_similarity",
]
