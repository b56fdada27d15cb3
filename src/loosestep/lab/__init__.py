"""The workbench: commands, trainer, reports, doctor, emulated hosts. Nothing else imports it."""
