"""Which example comes next: shuffled orders, and orders learned from gradients."""

from __future__ import annotations

from headrace.order.balanced import BalancedOrder
from headrace.order.coordinated import OrderService
from headrace.order.sampler import BalancedSampler

__all__ = ["BalancedOrder", "BalancedSampler", "OrderService"]
