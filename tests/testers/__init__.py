"""The contracts: one class for each kind of thing that the package has, a case of which says how to make one.

A case is a subclass of 5 to 15 lines whose name begins with ``Test``; it inherits the tests. A tester draws seeds, kill
points and inputs by hypothesis: `DRAWS` of each by day, always the same, and as many as ``METRICOPT_DRAWS`` says by
night. It makes public calls alone, and compares with an independent reference or with the undisturbed run, so that the
same cases hold whatever is rebuilt beneath.
"""

import os

DRAWS = int(os.environ.get("METRICOPT_DRAWS", "8"))
"""How many examples hypothesis draws."""

FEW = max(2, DRAWS // 8)
"""How many it draws where each is a whole run: ``@settings(max_examples=FEW)``."""
