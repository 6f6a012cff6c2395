class Launch:
    """A kernel launch with everything fixed but the stream and the pointers."""

    def __new__(
        cls,
        context: int,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        pointers: int,
        scalars: tuple[int, ...],
        hidden: int,
        workspace: int,
        workspace_bytes: int,
    ) -> Launch: ...
    def run(self, stream: int, /, *pointers: int | None) -> int: ...

def bind(launch: int, memset: int, current: int, push: int, pop: int, /) -> None: ...
