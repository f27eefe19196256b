"""The families of libraries, by name."""

from . import (
    cache,
    calc,
    config,
    dates,
    events,
    graph,
    ledger,
    matrix,
    routes,
    spans,
    stock,
    tasks,
    textflow,
    units,
)

FAMILIES = {
    module.FAMILY.name: module.FAMILY
    for module in (
        cache, calc, config, dates, events, graph, ledger, matrix, routes, spans, stock, tasks, textflow,
        units,
    )
}  # fmt: skip
