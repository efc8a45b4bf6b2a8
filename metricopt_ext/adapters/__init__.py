"""Adapters: a small vector phi that modulates a frozen model (paper, section 3.1 and Fig. S1).

`attach_film` scales and shifts the channels of chosen layers, ``h * (1 + A phi) + B phi``; `attach_input_bias` adds
``C phi`` to a linear layer. A, B and C are drawn once from a seed and stay fixed, so phi = 0 is the original model and
`Adapter.merge` can fold the tuned phi into the layers' own weights. Further coordinates of phi may act on the logits
themselves, as an offset for each class and a temperature (`Outputs`); `attach_outputs` attaches these alone.
"""
