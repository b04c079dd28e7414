"""What zbpipe._C was built with; written by setup.py."""

zbpipe_version = "0.1.0"
torch_version = "2.13.0+cpu"
torch_git_version = "cf30153c4c131c8164ee7798e5022d810682e2cb"
torch_cxx11_abi = True
python_cache_tag = "cpython-311"
python_ext_suffix = ".cpython-311-x86_64-linux-gnu.so"
kind = "release"
