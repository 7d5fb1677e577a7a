"""Prints the table of waits and launches at the end of the tier."""


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "table":
                terminalreporter.write_line(value)
