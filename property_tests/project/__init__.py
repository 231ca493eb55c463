"""Tests of this project itself: packaging, files, command line, messages. They are not installed."""
