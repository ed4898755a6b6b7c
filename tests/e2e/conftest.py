"""The real runs of the e2e tests, started in the background and handed out by name."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_runs import STOP, GetRun, Run, assert_finished
from e2e_specs import SPECS, Spec

AT_ONCE = 2
"""About 9 GiB and one busy core each."""
WAIT_S = 3600


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetRun]:
    """The finished run of this name. Only the runs of the selected test modules are started."""
    folder = tmp_path_factory.mktemp("e2e")
    selected = {item.path.stem for item in request.session.items}
    futures: dict[str, Future[Run]] = {}

    def started(spec: Spec, folder: Path) -> Run:
        if spec.after is not None:
            assert_finished(futures[spec.after].result(timeout=WAIT_S))
        return spec.start(folder)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for spec in SPECS:
            if spec.module in selected:
                futures[spec.name] = pool.submit(started, spec, folder)

        def get(name: str) -> Run:
            run = futures[name].result(timeout=WAIT_S)
            assert_finished(run)
            return run

        try:
            yield get
        finally:
            STOP.set()
            pool.shutdown(cancel_futures=True)
