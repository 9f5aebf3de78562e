from enum import IntEnum

class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209

class CUfunction_attribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

class CUlaunchAttributeID(IntEnum):
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

class CUlaunchAttributeValue:
    programmaticStreamSerializationAllowed: int

class CUlaunchAttribute:
    id: CUlaunchAttributeID
    value: CUlaunchAttributeValue

class CUlaunchConfig:
    gridDimX: int
    gridDimY: int
    gridDimZ: int
    blockDimX: int
    blockDimY: int
    blockDimZ: int
    sharedMemBytes: int
    hStream: CUstream
    attrs: list[CUlaunchAttribute]
    numAttrs: int

class _Handle:
    def __init__(self, init_value: int = 0) -> None: ...
    def __int__(self) -> int: ...
    def getPtr(self) -> int: ...

class CUcontext(_Handle): ...
class CUfunction(_Handle): ...
class CUkernel(_Handle): ...
class CUlibrary(_Handle): ...
class CUmodule(_Handle): ...
class CUstream(_Handle): ...

def cuInit(Flags: int) -> tuple[CUresult]: ...
def cuGetErrorName(error: CUresult) -> tuple[CUresult, bytes | None]: ...
def cuGetErrorString(error: CUresult) -> tuple[CUresult, bytes | None]: ...
def cuDriverGetVersion() -> tuple[CUresult, int]: ...
def cuCtxGetCurrent() -> tuple[CUresult, CUcontext]: ...
def cuModuleLoadData(image: bytes | int) -> tuple[CUresult, CUmodule]: ...
def cuModuleUnload(hmod: CUmodule | int) -> tuple[CUresult]: ...
def cuModuleGetFunction(hmod: CUmodule | int, name: bytes) -> tuple[CUresult, CUfunction]: ...
def cuLibraryLoadData(
    code: bytes | int,
    jitOptions: list[object],
    jitOptionsValues: list[object],
    numJitOptions: int,
    libraryOptions: list[object],
    libraryOptionValues: list[object],
    numLibraryOptions: int,
) -> tuple[CUresult, CUlibrary]: ...
def cuLibraryGetKernel(library: CUlibrary | int, name: bytes) -> tuple[CUresult, CUkernel]: ...
def cuLibraryUnload(library: CUlibrary | int) -> tuple[CUresult]: ...
def cuKernelGetFunction(kernel: CUkernel | int) -> tuple[CUresult, CUfunction]: ...
def cuKernelSetAttribute(
    attrib: CUfunction_attribute, val: int, kernel: CUkernel | int, dev: int
) -> tuple[CUresult]: ...
def cuFuncGetAttribute(attrib: CUfunction_attribute, hfunc: CUfunction | int) -> tuple[CUresult, int]: ...
def cuLaunchKernel(
    f: CUfunction | CUkernel | int,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: CUstream | int,
    kernelParams: tuple[tuple[object, ...], tuple[object, ...]] | int,
    extra: object,
) -> tuple[CUresult]: ...
def cuLaunchKernelEx(
    config: CUlaunchConfig, f: CUfunction | CUkernel | int, kernelParams: int, extra: int
) -> tuple[CUresult]: ...
