"""lora_experts compiled for GPUs that need not be there: the shapes of real models."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import jax
import pytest

from gpu_checks import check_kernels, copies_of
from lora_kernels import lora_experts, make_routing, pair_routing
from lora_kernels.gpu_targets.compile_only import compile_for, compile_with_thunks

pytestmark = pytest.mark.gpu_compile

# H100 and H200 differ in nothing that a kernel is compiled for.
TARGETS = ("a100", "h200")


@dataclass(frozen=True)
class Case:
    """One call of `lora_experts`: shapes, and the dtype of x, y, a and b."""

    name: str
    tokens: int
    chosen: int
    experts: int
    d_in: int
    part_widths: tuple[int, ...]
    rows_for_each_token: int
    max_rank: int = 16
    dtype: str = "bfloat16"
    slots: int = 8

    @property
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arguments of `lora_experts`, slots of tokens and experts of pairs."""
        parts, d_out = len(self.part_widths), sum(self.part_widths)
        bank = (self.slots, self.experts)
        pairs = self.tokens * self.chosen

        def shape(*sizes: int, dtype: str = self.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        return {
            "x": shape(self.tokens * self.rows_for_each_token, self.d_in),
            "y": shape(pairs, d_out),
            "a": shape(*bank, parts, self.max_rank, self.d_in),
            "b": shape(*bank, self.max_rank, d_out),
            "scale": shape(*bank, parts, dtype="float32"),
            "rank": shape(*bank, parts, dtype="int32"),
            "slot": shape(self.tokens, dtype="int32"),
            "expert": shape(pairs, dtype="int32"),
        }

    @property
    def bank(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The slot arrays, as they are given and over virtual slots."""
        given = {name: self.arguments[name] for name in "ab"}
        virtual = self.slots * self.experts
        flat = {
            f"flat_{name}": jax.ShapeDtypeStruct((virtual, *a.shape[2:]), a.dtype)
            for name, a in given.items()
        }
        return given | flat


# Model -> experts, choices of a token, hidden size, width of an expert.
MODELS = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}


def sites(tokens):
    for name, (experts, chosen, hidden, width) in MODELS.items():
        up, down = (hidden, (width, width), 1), (width, (hidden,), chosen)
        yield Case(f"{name}-gate_up", tokens, chosen, experts, *up)
        yield Case(f"{name}-down", tokens, chosen, experts, *down)


KINDS = list(itertools.product((16, 64), ("bfloat16", "float32")))
DECODE = [
    replace(site, name=f"{site.name}-{rank}-{dtype}", max_rank=rank, dtype=dtype)
    for site in sites(tokens=32)
    if site.rows_for_each_token == 1
    for rank, dtype in KINDS
] + [site for site in sites(tokens=32) if site.rows_for_each_token > 1]
PREFILL = [replace(site, name=f"{site.name}-prefill") for site in sites(tokens=2048)]


def call(case, implementation="triton"):
    def function(arguments):
        tokens = make_routing(arguments["slot"], case.slots)
        routing = pair_routing(tokens, arguments["expert"], case.experts)
        return lora_experts(
            *(arguments[name] for name in "xyab"),
            scale=arguments["scale"],
            rank=arguments["rank"],
            routing=routing,
            part_widths=case.part_widths,
            implementation=implementation,
        )

    return function


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_decode_is_the_fused_kernel_and_fits(target, case, record_property):
    assert check_kernels(target, case, call(case), record_property) == ["decode_kernel"]


@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.name)
def test_prefill_is_the_segment_form_and_fits(case, record_property):
    names = check_kernels("h200", case, call(case), record_property)
    assert names == ["expand_kernel", "shrink_kernel"]


@pytest.mark.parametrize("case", PREFILL[:2], ids=lambda case: case.name)
def test_gradients_fit(case, record_property):
    def gradients(arguments):
        def total(x, y, a, b):
            changed = arguments | {"x": x, "y": y, "a": a, "b": b}
            return call(case)(changed).astype("float32").sum()

        return jax.grad(total, range(4))(*(arguments[name] for name in "xyab"))

    names = check_kernels("h200", case, gradients, record_property)
    assert set(names) == {"expand_kernel", "grouped_kernel", "shrink_kernel"}


@pytest.mark.parametrize("tokens", [16, 600], ids=["decode", "prefill"])
def test_mosaic_gpu_compiles(tokens):
    case = Case("", tokens, 2, 8, 4096, (1024, 1024), 1)
    compiled = compile_for("h200", call(case, "mosaic_gpu"), case.arguments)
    assert compiled.as_text().count("mosaic_gpu") >= 2


def site_program(case):
    """What one site does, and its memory: the routing is the step's, not the site's."""

    def routing_of(slot, expert):
        return pair_routing(make_routing(slot, case.slots), expert, case.experts)

    arguments = case.arguments
    routing = jax.eval_shape(routing_of, arguments.pop("slot"), arguments.pop("expert"))

    def site(arguments, routing):
        return lora_experts(
            **arguments,
            routing=routing,
            part_widths=case.part_widths,
            implementation="triton",
        )

    compiled, thunks = compile_with_thunks("h200", site, arguments, routing)
    assert not copies_of(case.bank, compiled.as_text())
    kinds = sorted(thunk.kind for thunk in thunks)
    return kinds, compiled.memory_analysis().temp_size_in_bytes


OWN = ["kCopy", "kCustomCall"]


@pytest.mark.parametrize("case", list(sites(tokens=32)), ids=lambda case: case.name)
def test_a_decode_site_is_one_launch_without_temporaries(case):
    kinds, temp = site_program(case)
    # y is not donated, so it is copied once to be added into.
    assert [kind for kind in kinds if kind != "kCustomKernel"] == OWN
    # Where pairs are alone, their work items are written here, and not in the routing.
    pairs_alone = 4 * 32 * case.chosen <= case.slots * case.experts
    assert len(kinds) - len(OWN) <= (3 if pairs_alone else 0)
    assert temp < (32768 if pairs_alone else 1024)


@pytest.mark.parametrize("tokens", [16, 1024], ids=["decode", "prefill"])
def test_ten_times_the_slots_cost_a_site_nothing(tokens):
    case = Case("", tokens, 2, 8, 4096, (1024, 1024), 1)
    few, many = (site_program(replace(case, slots=slots)) for slots in (4, 40))
    launches = [Counter(kinds)["kCustomCall"] for kinds, _ in (few, many)]
    assert launches == ([1, 1] if tokens == 16 else [2, 2])
    # A longer list of work items, and starts of more groups.
    assert abs(many[1] - few[1]) <= 64 * 36 * case.experts


@pytest.mark.parametrize("case", list(sites(tokens=8)), ids=lambda case: case.name)
def test_routing_of_few_pairs_is_a_few_launches(case):
    compiled, thunks = compile_with_thunks("h200", call(case), case.arguments)
    kinds = Counter(thunk.kind for thunk in thunks)
    # Where pairs are grouped it is nine to twelve, in each layer.
    assert kinds == {"kCopy": 1, "kCustomKernel": 4, "kCustomCall": 1}
    assert not copies_of(case.bank, compiled.as_text())
