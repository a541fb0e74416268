"""Commands of `mxdebug`, one a file; `mxdebug.cli` gathers them. Each imports what it needs when it runs, so that --help stays quick."""
