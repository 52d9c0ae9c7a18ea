"""Kernel machines that adapt to the device: EigenPro 2.0 and its successors as scikit-learn estimators.

`formulas` and `planning` decide, `operands`, `products` and `fused` compute, `precondition` and `solver`
iterate, `fitting` and `streaming` wire them, `classifier` and `regressor` are what users see. docs/kernel.md
is the guide.
"""

from headrace.kernel.classifier import KernelClassifier
from headrace.kernel.regressor import KernelRegressor

__all__ = ["KernelClassifier", "KernelRegressor"]
