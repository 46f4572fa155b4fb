"""analysis: what a residual connection does to the flow of information, measured and drawn.

``mixing`` records a transformer over a batch and gives the depth-mixing matrix with the proof that it is the right one;
``figures`` draws it, and the loss curves of several runs, as SVG strings without any global plotting state.

    result = model_mixing(model, params, tokens)      # result.error is the proof
    Path("mixing.svg").write_text(mixing_figure(result))

May import: ops, residual, model, jax, matplotlib. Knows nothing of training, data or files.
"""

from lmres.analysis.figures import Curve, loss_figure, mixing_figure, run_colours
from lmres.analysis.mixing import MixingResult, model_mixing

__all__ = ["Curve", "MixingResult", "loss_figure", "mixing_figure", "model_mixing", "run_colours"]
