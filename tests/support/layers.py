"""Graphs of who refers to whom, and circles in them."""

import subprocess


def circle(edges):
    """A circle in a graph, as a list of its nodes; empty if there is none."""
    done, way = set(), []

    def visit(node):
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        way.append(node)
        for other in sorted(edges.get(node, ())):
            if found := visit(other):
                return found
        done.add(way.pop())
        return []

    return next((found for node in sorted(edges) if (found := visit(node))), [])


def symbols_of(objects):
    """The graph between objects, by name: which refers to a symbol that another defines."""
    defines, refers = {}, {}
    for name, path in objects.items():
        said = subprocess.run(["nm", "-g", "-P", path], check=True, capture_output=True, text=True).stdout
        for symbol, kind, *_ in (line.split() for line in said.splitlines()):
            if kind in ("U", "w", "v"):
                refers.setdefault(name, set()).add(symbol)
            elif kind not in ("W", "V", "u"):  # what every object that needs it has
                assert defines.setdefault(symbol, name) == name, f"{symbol} is defined twice"
    return {name: {defines[s] for s in refers.get(name, ()) if s in defines} for name in objects}
