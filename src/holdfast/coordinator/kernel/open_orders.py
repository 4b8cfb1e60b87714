"""Orders to the engine that it has not acknowledged yet. Part of the state: a successor announces them again."""

from __future__ import annotations

import msgspec

from holdfast.protocol.engine_orders import EngineOrder, ProvideNode

KEPT = 5000
"""Open orders that are kept: more than a job of 4,096 nodes has at once, and few enough for a state that is written often."""


class OpenOrders(msgspec.Struct):
    """Written through these methods alone: by the kernel's context, and by `membership` for nodes that are there."""

    last_id: int = 0
    """Number of the newest order; 0: there was none."""
    open: dict[int, EngineOrder] = {}
    """By number, oldest first."""
    newest: dict[str, int] = {}
    """Numbers of the open orders by kind and node, of which there is one at most. Looked up and not searched: a thousand
    nodes may be lost at once."""

    def add(self, order: EngineOrder) -> EngineOrder:
        """Opens an order. Returns it with its number."""
        # The older order is dropped first: an engine that was away for long must not release a node twice, for
        # two reasons, with the node's return in between.
        if (node := _node_of(order)) is not None:
            self.withdraw(type(order), node)
        self.last_id += 1
        numbered = msgspec.structs.replace(order, order_id=self.last_id)
        self.open[self.last_id] = numbered
        if node is not None:
            self.newest[_key(type(order), node)] = self.last_id
        # An engine that acknowledges nothing must not make the state grow: it is written with every decision.
        if len(self.open) > KEPT:
            self.close(next(iter(self.open)))
        return numbered

    def close(self, order_id: int) -> EngineOrder | None:
        """The engine has carried it out, or cannot. None: it is not open, so this was heard before."""
        order = self.open.pop(order_id, None)
        if order is not None and (node := _node_of(order)) is not None:
            del self.newest[_key(type(order), node)]
        return order

    def withdraw(self, kind: type[EngineOrder], node: str | None = None) -> None:
        """Orders of this kind are not to be carried out any more. node: for which; None where the kind names none."""
        if node is not None:
            if (order_id := self.newest.get(_key(kind, node))) is not None:
                self.close(order_id)
            return
        for order_id in [i for i, order in self.open.items() if type(order) is kind]:
            del self.open[order_id]


def _key(kind: type[EngineOrder], node: str) -> str:
    return f"{kind.__name__} {node}"


def _node_of(order: EngineOrder) -> str | None:
    return None if isinstance(order, ProvideNode) else order.node
