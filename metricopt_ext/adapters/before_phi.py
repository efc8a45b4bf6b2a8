"""What a model computes before phi: its forward pass, cut where the first layer that phi acts on begins."""

import copy
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn
from torch.fx import Graph, Interpreter, Node, Tracer
from torch.fx.node import map_arg

from metricopt_ext.adapters.layers import pins_mode
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.kept_outputs import digest_of, digest_of_model
from metricopt_ext.utils.words import brief


class Cut(NamedTuple):
    """A forward pass in two parts, of any model of the structure that was cut: weights are read when it is run.

    Attributes:
        head: From the model's input to what the layer that it was cut at needs.
        tail: From there to the model's output.
    """

    head: Graph
    tail: Graph

    def features(self, model: nn.Module, x: Any) -> Any:
        """Return what the first part gives for the model's input."""
        return Interpreter(model, graph=self.head).run(x)

    def output(self, model: nn.Module, features: Any) -> Any:
        """Return the model's output for what the first part gave."""
        return Interpreter(model, graph=self.tail).run(features)

    def before(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that the first part calls."""
        return [model.get_submodule(str(node.target)) for node in self.head.find_nodes(op="call_module")]

    def state(self, model: nn.Module) -> str:
        """Return what identifies all that a model's first part depends on but its input."""
        tensors = [attrgetter(node.target)(model) for node in self.head.find_nodes(op="get_attr")]
        return " ".join([str(self.head), *map(digest_of_model, self.before(model)), digest_of(tensors)])


def cut_before(model: nn.Module, layer: str) -> Cut:
    """Cut a forward pass at a layer's input.

    Where more than that one tensor is needed from there on, as within a residual block, the cut is at the input of the
    module around it.

    Args:
        model: A model of one input, in evaluation mode.
        layer: Name of the first layer that phi acts on.

    Raises:
        AdapterError: There is no such cut: ``torch.fx`` can't trace the forward pass, nothing comes before the layer
            or more than a tensor does, or the model has hooks or another forward pass than its class, of which nothing
            is known. The message follows "as".
    """
    if "forward" in vars(model):  # which a trace, of its class's own, does not know
        raise AdapterError(f"{type(model).__name__} has another forward pass than its class")
    why = f"what comes before {layer!r} is no single tensor"
    parts = layer.split(".")
    for depth in range(len(parts), 0, -1):
        first = ".".join(parts[:depth])
        try:
            graph = _TracerTo(first).trace(copy.copy(model))
            for node in graph.find_nodes(op="get_attr"):  # a tensor that forward makes is of the traced copy alone
                attrgetter(node.target)(model)
        except Exception as error:  # of the model's own code, which meets what stands for its inputs
            why = f"torch.fx can't trace {type(model).__name__} to {layer!r} ({brief(error)})"
            continue
        if (cut := _cut(graph, first)) is not None:
            around = [model.get_submodule(".".join(parts[:at])) for at in range(depth)]
            for each in (*around, *(inner for module in cut.before(model) for inner in module.modules())):
                if not all(map(pins_mode, (*each._forward_pre_hooks.values(), *each._forward_hooks.values()))):
                    raise AdapterError(f"{type(each).__name__} has hooks, of which nothing is known")
            return cut
    raise AdapterError(why)


class _TracerTo(Tracer):
    """Traces each module as one that does not hold the module that is looked for."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.first = first

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not self.first.startswith(f"{name}.")


def _cut(graph: Graph, first: str) -> Cut | None:
    """Cut at the first call of a module; None if its input is the model's, or what follows needs more than that."""
    given, calls = graph.find_nodes(op="placeholder")[0], graph.find_nodes(op="call_module", target=first)
    if not calls or calls[0].all_input_nodes[:1] in ([], [given]):
        return None
    kept = calls[0].all_input_nodes[0]
    before = {kept}
    for node in reversed(graph.nodes):
        if node in before:
            before.update(node.all_input_nodes)
    # An input but the first has its default; one without is not there, nor is what needs it.
    nodes = [node for node in graph.nodes if node is not given and (node.op != "placeholder" or node.args)]
    *nodes, output = nodes
    try:
        head = _part(given, (node for node in nodes if node in before), kept)
        return Cut(head, _part(kept, (node for node in nodes if node not in before), output.args[0]))
    except KeyError:
        return None


def _part(given: Node, nodes: Iterable[Node], result: Any) -> Graph:
    """Return a graph of some nodes, whose input is in place of another; a KeyError if they need more than these."""
    part = Graph()
    copies = {given: part.placeholder(given.name)}
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(map_arg(result, copies.__getitem__))
    return part
