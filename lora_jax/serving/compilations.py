"""Counts the programs that XLA compiles. Source: `jax.monitoring` events."""

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Recorded by JAX once for each new program, also when it comes from the disk cache."""


class CompilationCounter:
    """Context manager whose `count` and `seconds` grow with each new XLA program.

    It counts the whole process: every jitted function, and every array operation
    outside of jit that XLA had not seen with these shapes.

    Example:
      >>> import jax
      >>> with CompilationCounter() as counter:
      ...     _ = jax.jit(lambda x: x * 3)(1.0)
      >>> counter.count >= 1
      True
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.programs: list[str] = []

    def __enter__(self) -> "CompilationCounter":
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
            self.seconds += duration_secs
            self.programs.append(str(details.get("fun_name", "")))
