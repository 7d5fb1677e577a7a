"""Print the table of waits and launches after all tests of this folder."""


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "table":
                terminalreporter.write_line(value)
