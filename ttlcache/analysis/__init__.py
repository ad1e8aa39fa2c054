"""Offline: recordings become tables, reasons and pictures. Nothing on the serving path
imports it."""
