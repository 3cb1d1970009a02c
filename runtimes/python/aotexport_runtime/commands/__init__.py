"""Commands on bundles beside calls: test a bundle against its recorded calls, save a changed one, describe one."""
