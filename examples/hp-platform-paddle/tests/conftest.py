"""The option `--full`: all conformance suites, and training in all layouts."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all conformance suites, and training in all layouts")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="only with --full")
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(skip)
