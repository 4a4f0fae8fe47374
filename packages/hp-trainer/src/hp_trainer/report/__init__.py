"""Reports of runs: one HTML file that needs neither a server nor the network."""

from hp_trainer.report.comparison import compare_runs
from hp_trainer.report.history import RunHistory
from hp_trainer.report.page import report_run

__all__ = ["RunHistory", "compare_runs", "report_run"]
