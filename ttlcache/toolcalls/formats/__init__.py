"""How models write tool calls: one file a format; `chain` tries each `Parser`."""
