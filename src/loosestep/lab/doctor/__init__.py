"""What a machine has, how fast its links are, and which strategy suits them.

machine = inspect_machine()
links = measure_links()  # on every rank
advice = recommend(machine, links, num_parameters=10_000_000, step_seconds=0.2)
show(machine, links, advice)
"""

from loosestep.lab.doctor.advice import Cost, Recommendation, recommend
from loosestep.lab.doctor.findings import Finding, Level
from loosestep.lab.doctor.links import Links, Pair, Rate
from loosestep.lab.doctor.machine import inspect_machine
from loosestep.lab.doctor.measuring import measure_links
from loosestep.lab.doctor.recipe_costs import cost_of_recipes
from loosestep.lab.doctor.show import show
from loosestep.lab.doctor.symptoms import inspect_links

__all__ = [
    "Cost",
    "Finding",
    "Level",
    "Links",
    "Pair",
    "Rate",
    "Recommendation",
    "cost_of_recipes",
    "inspect_links",
    "inspect_machine",
    "measure_links",
    "recommend",
    "show",
]
