"""The driver module and the launcher against the stub driver: no GPU is needed.

What is tested runs in processes of its own, since a process opens one driver and keeps it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driving import assert_balanced, play

# --- The library ------------------------------------------------------------------------------


def test_a_library_that_is_not_there_is_named(stub_driver: Any) -> None:
    stub_driver.library = stub_driver.folder / "absent.so"
    error = play(stub_driver, "print(json.dumps(failure(driver.library)))")
    assert error["type"] == "RuntimeError"
    assert str(stub_driver.library) in error["words"]


def test_a_library_without_a_function_is_no_driver(
    stub_driver: Any, stub_module: tuple[Any, Path]
) -> None:
    text = "int cuInit(unsigned flags); int cuInit(unsigned flags) { return (int)flags; }\n"
    stub_driver.library = stub_module[0].build(stub_driver.folder, text, "poor.so")
    error = play(stub_driver, "print(json.dumps(failure(driver.library)))")
    assert "cuLaunchKernel" in error["words"]


@pytest.mark.parametrize("version", [(12, 9), (13, 1)])
def test_version(stub_driver: Any, version: tuple[int, int]) -> None:
    stub_driver.version = version  # and no GPU: the version can be read without one
    assert tuple(play(stub_driver, "print(json.dumps(driver.version()))")) == version


def test_names_of_errors(stub_driver: Any) -> None:
    known, unknown = play(
        stub_driver, "print(json.dumps([driver.error_name(2), driver.error_name(12345)]))"
    )
    assert "CUDA_ERROR_OUT_OF_MEMORY" in known
    assert "out of memory" in known
    assert "12345" in unknown


# --- Devices ----------------------------------------------------------------------------------


def test_devices_of_several_architectures(stub_driver: Any) -> None:
    stub_driver.version = (12, 8)
    stub_driver.gpu((9, 0), name="Imaginary H200").gpu(
        (8, 6), sms=84, shared=101_376, threads=512, registers=32_768, name="Imaginary A10"
    ).gpu((12, 0), sms=170, shared=101_376, name="Imaginary 5090")
    devices = play(
        stub_driver,
        """
        from dataclasses import asdict
        from scan_registry.hardware.device import device
        print(json.dumps([asdict(device(ordinal)) for ordinal in range(3)]))
        """,
    )
    assert [device["name"][10:] for device in devices] == ["H200", "A10", "5090"]
    assert [device["capability"] for device in devices] == [[9, 0], [8, 6], [12, 0]]
    assert devices[1] == {
        "name": "Imaginary A10",
        "capability": [8, 6],
        "sm_count": 84,
        "shared_memory_per_block": 101_376,
        "registers_per_block": 32_768,
        "threads_per_block": 512,
        "driver": [12, 8],
    }
    assert not stub_driver.calls("cuDevicePrimaryCtxRetain")


@pytest.mark.parametrize(("gpus", "status"), [(0, 100), (1, 101)])
def test_a_device_that_is_not_there(stub_driver: Any, gpus: int, status: int) -> None:
    for _ in range(gpus):
        stub_driver.gpu()
    error = play(
        stub_driver,
        "from scan_registry.hardware.device import device\nprint(json.dumps(failure(device, 1)))",
    )
    assert error["status"] == status


def test_a_context_that_cannot_be_had(stub_driver: Any) -> None:
    stub_driver.gpu().fail("cuDevicePrimaryCtxRetain", 2, times=1)
    first, second = play(
        stub_driver,
        """
        first = failure(driver.primary_context, 0)
        print(json.dumps([first, driver.primary_context(0)]))
        """,
    )
    assert first["status"] == 2
    assert second


# --- Loading ----------------------------------------------------------------------------------


#: By the driver's CUDA version: an image, the device's capability, and what loading it comes to.
IMAGES: dict[tuple[int, int], list[tuple[dict[str, Any], tuple[int, int], int]]] = {
    (12, 0): [
        ({"arch": "sm_80"}, (8, 0), 0),
        ({"arch": "sm_80"}, (8, 9), 0),
        ({"arch": "sm_86"}, (8, 0), 209),
        ({"arch": "sm_80"}, (9, 0), 209),
        ({"arch": "sm_90a"}, (9, 0), 0),
        ({"target": "sm_80", "version": "8.0"}, (9, 0), 0),
        ({"target": "sm_80", "version": "8.1"}, (9, 0), 222),
    ],
    (12, 8): [
        ({"arch": "sm_100a", "abi": 8}, (10, 0), 0),
        ({"arch": "sm_100", "abi": 8}, (10, 3), 0),
        ({"arch": "sm_100a", "abi": 8}, (10, 3), 209),
        ({"arch": "sm_90", "abi": 8}, (9, 0), 200),
        ({"target": "sm_80", "version": "8.7"}, (12, 0), 0),
        ({"target": "sm_80", "version": "8.8"}, (12, 0), 222),
        ({"target": "sm_90", "version": "8.0"}, (8, 0), 218),
    ],
    (13, 0): [
        ({"arch": "sm_90", "abi": 8}, (9, 0), 0),
        ({"target": "sm_80", "version": "9.0"}, (8, 0), 0),
        ({"target": "sm_80", "version": "9.1"}, (8, 0), 222),
    ],
}


@pytest.mark.parametrize("version", IMAGES)
def test_images(stub_driver: Any, version: tuple[int, int]) -> None:
    stub_driver.version = version
    contents = []
    for image, capability, _ in IMAGES[version]:
        stub_driver.gpu(capability)
        make = stub_driver.ptx if "target" in image else stub_driver.cubin
        contents.append(make(**image))
    script = "print(json.dumps([failure(load, n, 0, n) for n in range(len(images))]))"
    outcomes = play(stub_driver, script, *contents)
    statuses = [error["status"] if error else 0 for error in outcomes]
    assert statuses == [status for *_, status in IMAGES[version]]
    assert_balanced(stub_driver)


def test_what_is_no_image(stub_driver: Any) -> None:
    stub_driver.gpu()
    script = "print(json.dumps([failure(load, 0, 0, n)['status'] for n in range(3)]))"
    assert play(stub_driver, script, b"", b"no code", b"\x7fELF" + bytes(60)) == [200] * 3
    assert_balanced(stub_driver)


def test_ample_shared_memory_is_asked_for(stub_driver: Any) -> None:
    stub_driver.gpu(shared=100_000)
    script = """
        enough = launch(load(shared=90_000), shared=90_000).run(0, 1, 2)
        unasked = launch(load(), shared=90_000).run(0, 1, 2)
        print(json.dumps([enough, unasked, failure(load, 0, 100_001)["status"]]))
    """
    assert play(stub_driver, script, stub_driver.cubin()) == [0, 1, 1]
    assert_balanced(stub_driver)


def test_a_forked_child_is_refused(stub_driver: Any) -> None:
    stub_driver.gpu()
    script = """
        import os
        load()
        child = os.fork()
        if child == 0:
            os._exit(failure(load)["status"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert play(stub_driver, script, stub_driver.cubin()) == 3  # CUDA_ERROR_NOT_INITIALIZED


CALLS_OF_LOADING = [
    "cuCtxPushCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
]


@pytest.mark.parametrize("call", [None, *CALLS_OF_LOADING])
def test_loading_leaves_the_thread_as_it_was(stub_driver: Any, call: str | None) -> None:
    stub_driver.gpu().gpu((8, 0))
    if call:
        stub_driver.fail(call, 719, times=3)
    script = "print(json.dumps(with_each_context(lambda: failure(load, 0, 90_000))))"
    outcomes = play(stub_driver, script, stub_driver.cubin())
    assert [(error or {}).get("status") for error, _ in outcomes] == [719 if call else None] * 3
    assert all(same for _, same in outcomes)
    assert_balanced(stub_driver)
    modes = [c for c in stub_driver.calls("cuThreadExchangeStreamCaptureMode") if not c.status]
    assert [mode.number("mode") for mode in modes[1::2]] == [0] * (len(modes) // 2)


# --- Launching --------------------------------------------------------------------------------


def test_a_launch_arrives_as_prepared(stub_driver: Any) -> None:
    stub_driver.gpu()
    script = """
        prepared = launch(load(), workspace=1, workspace_bytes=4096)
        print(prepared.run(77, 1000, 2000))
    """
    assert play(stub_driver, script, stub_driver.cubin()) == 0
    zeroed, launched = stub_driver.calls("cuMemsetD8Async", "cuLaunchKernel")
    assert zeroed.name == "cuMemsetD8Async"
    assert [zeroed.number(k) for k in ("pointer", "value", "bytes", "stream")] == [
        2000,
        0,
        4096,
        77,
    ]
    assert (launched.entry, launched.grid, launched.block) == ("kernel", (7, 2, 1), (128, 1, 1))
    assert launched.number("stream") == 77
    assert_balanced(stub_driver)


def test_what_the_driver_says_of_launches(stub_driver: Any) -> None:
    stub_driver.gpu()
    script = """
        function = load()
        print(json.dumps([launch(**{"function": function, **changes}).run(0, 1, 2) for changes in (
            {"shared": 49_152},
            {"grid": (2**31 - 1, 65535, 65535)},
            {"grid": (0, 1, 1)},
            {"block": (1025, 1, 1)},
            {"block": (32, 32, 2)},
            {"block": (1, 1, 128)},
            {"shared": 49_153},
            {"function": 1},
        )]))
    """
    assert play(stub_driver, script, stub_driver.cubin()) == [0, 0, 1, 1, 1, 1, 1, 400]


def test_a_function_is_of_its_own_context(stub_driver: Any) -> None:
    stub_driver.gpu().gpu()
    script = "print(launch(load(0), 1).run(0, 1, 2))"
    assert play(stub_driver, script, stub_driver.cubin()) == 400


@pytest.mark.parametrize("call", [None, "cuCtxPushCurrent", "cuMemsetD8Async", "cuLaunchKernel"])
def test_launching_leaves_the_thread_as_it_was(stub_driver: Any, call: str | None) -> None:
    stub_driver.gpu().gpu((8, 0))
    if call:  # the first push is the loader's
        stub_driver.fail(call, 719, after=1 if "Push" in call else 0)
    script = """
        prepared = launch(load(), workspace=1, workspace_bytes=8)
        print(json.dumps(with_each_context(lambda: prepared.run(0, 1, 2))))
    """
    outcomes = play(stub_driver, script, stub_driver.cubin())
    expected = [719 if call else 0] * 3
    if call == "cuCtxPushCurrent":
        expected[1] = 0  # nothing has to be pushed where the right context is current
    assert [status for status, _ in outcomes] == expected
    assert all(same for _, same in outcomes)
    assert_balanced(stub_driver)


def test_threads_launch_side_by_side(stub_driver: Any) -> None:
    stub_driver.gpu().gpu((9, 0))
    threads, launches = 6, 50
    script = f"""
        prepared = [launch(load(ordinal), ordinal) for ordinal in (0, 1)]
        start, failed = threading.Barrier({threads}), []
        def work(number):
            if number % 3:
                make_current(number % 3 - 1)
            context = current()
            start.wait()
            for i in range({launches}):
                if prepared[i % 2].run(number, 1, 2) or current() != context:
                    failed.append(number)
        workers = [threading.Thread(target=work, args=(n,)) for n in range({threads})]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        print(json.dumps(failed))
    """
    assert play(stub_driver, script, stub_driver.cubin()) == []
    launched = stub_driver.calls("cuLaunchKernel")
    assert len(launched) == threads * launches
    assert {call.device for call in launched} == {0, 1}
    assert len({call.thread for call in launched}) == threads
    assert_balanced(stub_driver)
