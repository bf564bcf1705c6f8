"""Array aliases and the named choices that appear in public signatures."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
Sensitivity: TypeAlias = Literal["conditional", "marginal"]
Accounting: TypeAlias = Literal["exact", "zcdp", "classical"]
Unit: TypeAlias = Literal["row", "client"]
OnExhausted: TypeAlias = Literal["refuse", "repeat"]
