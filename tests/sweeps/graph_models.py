"""Models and layers of torch_geometric, with dynamic numbers of nodes and edges."""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

from tests.sweeps.made import Call, Made, Model, made, the

NODES = Dim("nodes", min=2, max=64)
EDGES = Dim("edges", min=2, max=256)


class OnGraphs(torch.nn.Module):
    """Layers of torch_geometric over nodes and edges, pooled per graph."""

    def __init__(self, layers: list[torch.nn.Module], pool: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.pool = pool

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, *, graph: torch.Tensor) -> torch.Tensor:
        """Return values of nodes, or of graphs."""
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x if self.pool is None else self.pool(x, graph, 2)


def _nodes_and_edges() -> Call:
    # The last node has no edge, so that a call with one node less is a graph too.
    return Call(
        {"x": torch.randn(8, 6), "edge_index": torch.randint(7, (2, 20))}, {"x": {0: NODES}, "edge_index": {1: EDGES}}
    )


def _graphs() -> Call:
    call = _nodes_and_edges()
    graph = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    return Call({**call.kwargs, "graph": graph}, {**call.shapes, "graph": {0: NODES}})


def _whole(name: str, **options: Any) -> Model:
    return made(f"torch_geometric.nn.models.{name}", 6, 16, num_layers=2, out_channels=5, **options), _nodes_and_edges


def _layers(name: str, *args: Any, pool: str = "") -> Model:
    return _pooled([made(f"torch_geometric.nn.{name}", size, 8, *args) for size in (6, 8)], pool)


def _same(name: str, /, *args: Any, **options: Any) -> Model:
    """Return a model of two layers whose values have as many features as the nodes have."""
    return _pooled([made(f"torch_geometric.nn.{name}", *args, **options)] * 2)


def _pooled(layers: list[Made], pool: str = "") -> Model:
    pooled = {"pool": the(f"torch_geometric.nn.global_{pool}_pool")} if pool else {}
    return made(f"{__name__}.OnGraphs", layers, **pooled), _graphs


GEOMETRIC = {
    "gcn": _whole("GCN", dropout=0.2),
    "graphsage": _whole("GraphSAGE"),
    "gat": _whole("GAT", heads=2),
    "gat_v2": _whole("GAT", heads=2, v2=True),
    "gin": _whole("GIN", norm="batch_norm"),
    "edge_cnn": _whole("EdgeCNN", jk="cat"),
    "u_net": (made("torch_geometric.nn.GraphUNet", 6, 8, 5, depth=2), _nodes_and_edges),
    "cheb": _layers("ChebConv", 2, pool="mean"),
    "transformer_conv": _layers("TransformerConv", pool="max"),
    "sg": _layers("SGConv", pool="add"),
    "arma": _layers("ARMAConv"),
    "leconv": _layers("LEConv"),
    "graph": _layers("GraphConv", pool="mean"),
    "tag": _layers("TAGConv", 2),
    "ssg": _layers("SSGConv", 0.1),
    "feast": _layers("FeaStConv", 2),
    "mf": _layers("MFConv", 3),
    "gated": _layers("ResGatedGraphConv"),
    "gen": _layers("GENConv"),
    "cluster_gcn": _layers("ClusterGCNConv"),
    "eg": _same("EGConv", 6, 6, num_heads=2, num_bases=2),
    "general": _layers("GeneralConv"),
    "film": _layers("FiLMConv"),
    "hypergraph": _layers("HypergraphConv"),
    "mix_hop": _pooled([made("torch_geometric.nn.MixHopConv", size, 8) for size in (6, 24)]),
    "antisymmetric": _same("AntiSymmetricConv", 6),
    "gated_steps": _same("GatedGraphConv", 6, 2),
    "cg": _same("CGConv", 6, batch_norm=True),
    "agnn": _same("AGNNConv"),
    "directed": _pooled(
        [made("torch_geometric.nn.DirGNNConv", made("torch_geometric.nn.SAGEConv", size, 8)) for size in (6, 8)]
    ),
    "edge": _pooled(
        [made("torch_geometric.nn.EdgeConv", made("torch.nn.Linear", 2 * size, 8)) for size in (6, 8)], pool="max"
    ),
    "pna": _layers(
        "PNAConv", ["mean", "max", "std"], ["identity", "amplification"], made("torch.tensor", (0, 2, 4, 2))
    ),
    "mapped": _pooled(
        [made("torch_geometric.nn.GINConv", made("torch.nn.Linear", size, 8)) for size in (6, 8)], pool="add"
    ),
    "gps": _pooled(
        [made("torch_geometric.nn.GPSConv", 6, made("torch_geometric.nn.GCNConv", 6, 6), heads=2, norm=None)]
    ),
}
