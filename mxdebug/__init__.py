"""mxdebug: find out why a block-scaled (MXFP4, NVFP4, MXFP8) layer computes garbage."""
