"""`lora-jax bench`: measures a part of the library on this machine."""

import argparse

from lora_jax.cli.console import output, table

SUMMARY = "measure how long it takes to put an adapter into a slot"

DETAILS = """\
`lora-jax bench swap` activates adapters that are registered on the host, with 1 to
10,000 of them registered, and compares the time with a bare transfer of as many bytes
to the device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add("what", choices=["swap"], help="what to measure")
    add("--registered", type=int, nargs="+", default=[1, 10, 100, 1_000, 10_000])
    add("--layers", type=int, default=56, help="adapted layers (default: %(default)s)")
    add("--width", type=int, default=1024, help="their width (default: %(default)s)")
    add("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    add("--slots", type=int, default=8, help="of the bank (default: %(default)s)")
    add("--repeats", type=int, default=20, help="activations for each line")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
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
