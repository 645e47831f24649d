"""The contract: what other people's programs and command lines hold on to. Nothing recorded here may disappear.

Text files hold the record, one fact a line, and a test of each compares today's program with it. A test fails where a
line no longer holds, never because something was added. To remove a line is a decision of its own, which the changelog
names. `python -m tests.contract.record` adds what is new.
"""
