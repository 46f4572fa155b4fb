"""experiment: comparisons that are fair, and what they cost.

``compare`` trains the variants of a comparison and assembles a ``result``, ``report`` turns it into a table and one
HTML file, ``bench`` times single steps in turns, ``machine`` says what they ran on.

May import: analysis, train, model, residual, data, sharding, config.
"""
