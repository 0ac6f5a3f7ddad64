"""The kernels stage: what was compiled once is not compiled again. Import-free; archives are read without a GPU."""
