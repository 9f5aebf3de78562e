from collections.abc import Sequence

from cuda.bindings import driver

__version__: str

class ProgramOptions:
    name: str | None
    arch: str | None
    def __init__(
        self,
        *,
        name: str | None = "default_program",
        arch: str | None = None,
        debug: bool | None = None,
        lineinfo: bool | None = None,
        ptxas_options: str | list[str] | tuple[str, ...] | None = None,
        max_register_count: int | None = None,
        ftz: bool | None = None,
        prec_sqrt: bool | None = None,
        prec_div: bool | None = None,
        fma: bool | None = None,
        use_fast_math: bool | None = None,
        extra_device_vectorization: bool | None = None,
        define_macro: str | tuple[str, str] | Sequence[str | tuple[str, str]] | None = None,
        undefine_macro: str | Sequence[str] | None = None,
        std: str | None = None,
        builtin_move_forward: bool | None = None,
        builtin_initializer_list: bool | None = None,
        disable_warnings: bool | None = None,
        restrict: bool | None = None,
        device_as_default_execution_space: bool | None = None,
        device_int128: bool | None = None,
        no_display_error_number: bool | None = None,
        diag_error: int | Sequence[int] | None = None,
        diag_suppress: int | Sequence[int] | None = None,
        diag_warn: int | Sequence[int] | None = None,
        brief_diagnostics: bool | None = None,
        split_compile: int | None = None,
        minimal: bool | None = None,
        no_cache: bool | None = None,
    ) -> None: ...
    def as_bytes(self, backend: str, target_type: str | None = None) -> list[bytes]: ...

class Kernel:
    @property
    def handle(self) -> driver.CUkernel: ...
    @property
    def num_arguments(self) -> int: ...

class ObjectCode:
    @property
    def code(self) -> bytes | str: ...
    @property
    def code_type(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def handle(self) -> driver.CUlibrary: ...
    @staticmethod
    def from_cubin(
        module: bytes | str, *, name: str = "", symbol_mapping: dict[str, str] | None = None
    ) -> ObjectCode: ...
    @staticmethod
    def from_ptx(
        module: bytes | str, *, name: str = "", symbol_mapping: dict[str, str] | None = None
    ) -> ObjectCode: ...
    def get_kernel(self, name: str | bytes) -> Kernel: ...

class Program:
    def __init__(
        self, code: str | bytes | bytearray, code_type: str, options: ProgramOptions | None = None
    ) -> None: ...
    def close(self) -> None: ...
    def compile(
        self,
        target_type: str,
        name_expressions: tuple[str, ...] | list[str] = (),
        logs: object | None = None,
    ) -> ObjectCode: ...

class Device:
    def __init__(self, device_id: Device | int | None = None) -> None: ...
    @property
    def device_id(self) -> int: ...
    @property
    def arch(self) -> str: ...
    @property
    def compute_capability(self) -> tuple[int, int]: ...
    def set_current(self) -> None: ...
