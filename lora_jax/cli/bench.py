"""`lora-jax bench`: measures a part of the library on this machine."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from lora_jax.cli.console import output, progress, table
from lora_jax.cli.sources import keep_compiled_programs, positive

SUMMARY = "measure what LoRA costs here: tokens, or an adapter's way to a slot"

DETAILS = """\
`lora-jax bench generate` generates with one batch of a model, in turn without and with
adapters, and compares the tokens per second.

`lora-jax bench swap` activates adapters that are registered on the host, with 1 to
10,000 of them registered, and compares the time with a bare transfer of as many bytes
to the device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("what", choices=["generate", "swap"], help="what to measure")
    parser.add_argument(
        "--rank", type=positive, default=16, help="of the adapters (default: 16)"
    )
    add = parser.add_argument_group("generate").add_argument
    add("--model", default="smollm2-135m", help="folder, hub id, or name (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--rows", type=positive, default=16, help="of the batch (default: 16)")
    add("--prompt", type=positive, default=64, help="tokens of each (default: 64)")
    add("--new", type=positive, default=64, help="tokens to generate (default: 64)")
    add("--adapters", type=positive, default=8, help="in the batch (default: 8)")
    add("--runs", type=positive, default=3, help="of each kind (default: 3)")
    add("--json", type=Path, metavar="FILE", help="write all times there as well")
    add = parser.add_argument_group("swap").add_argument
    add("--registered", type=int, nargs="+", default=[1, 10, 100, 1_000, 10_000])
    add("--layers", type=int, default=56, help="adapted layers (default: 56)")
    add("--width", type=int, default=1024, help="their width (default: 1024)")
    add("--slots", type=int, default=8, help="of the bank (default: 8)")
    add("--repeats", type=int, default=20, help="activations for each line")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    return _swap(args) if args.what == "swap" else _generate(args)


def _generate(args: argparse.Namespace) -> int:
    import jax

    from lora_jax.models import load_causal_lm
    from lora_jax.serving.generate_bench import GenerationSizes, measure_generation

    sizes = GenerationSizes(
        args.rows, args.prompt, args.new, args.adapters, args.rank, args.runs
    )
    keep_compiled_programs()
    with progress(f"loading {args.model}") as say:
        model = load_causal_lm(args.model, args.dtype, progress=say)
    with progress("compiling and measuring"):
        base, lora, compiled = measure_generation(model, sizes)
    device = jax.devices()[0].device_kind
    title = (
        f"{args.model}, {args.dtype}, {device}: {sizes.rows} sequences, {sizes.prompt} "
        f"+ {sizes.new} tokens, {sizes.adapters} adapters of rank {sizes.rank}; "
        f"{compiled} compilations after warm-up"
    )
    columns = ["", "tokens/s", "prefill", "decode step", "fastest run", "slowest run"]
    rows = [
        (
            name,
            f"{times.tokens_per_second(sizes):.0f}",
            _ms(min(times.prefill)),
            _ms(times.step(sizes)),
            f"{min(times.whole):.2f} s",
            f"{max(times.whole):.2f} s",
        )
        for name, times in (("base model", base), ("with LoRA", lora))
    ]
    output().print(table(title, columns, rows))
    kept = lora.tokens_per_second(sizes) / base.tokens_per_second(sizes)
    output().print(f"LoRA keeps {kept:.0%} of the base model's speed.")
    if args.json is not None:
        record = {
            "model": args.model,
            "dtype": args.dtype,
            "device": device,
            "jax": jax.__version__,
            "sizes": asdict(sizes),
            "compilations_after_warmup": compiled,
            "base_seconds": asdict(base),
            "lora_seconds": asdict(lora),
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


def _swap(args: argparse.Namespace) -> int:
    import jax

    from lora_jax.manager.swap_bench import measure_swaps

    results = measure_swaps(
        args.registered,
        layers=args.layers,
        width=args.width,
        rank=args.rank,
        slots=args.slots,
        repeats=args.repeats,
    )
    device = jax.devices()[0]
    moved = results[0].slot_bytes
    title = (
        f"one activation of {moved / 2**20:.1f} MiB, {args.slots} slots, "
        f"{device.device_kind}; a bare transfer takes {_ms(results[0].transfer)}"
    )
    columns = ["registered", "fastest", "median", "GB/s", "times the transfer"]
    rows = [
        (
            f"{result.registered:,}",
            _ms(result.fastest),
            _ms(result.median),
            f"{result.slot_bytes / result.fastest / 1e9:.2f}",
            f"{result.ratio:.1f}",
        )
        for result in results
    ]
    output().print(table(title, columns, rows))
    return 0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
