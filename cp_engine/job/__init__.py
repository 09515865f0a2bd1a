"""Job: the command. Imports everything; inside it `checks` < `launch`, `toml` < `verify` < the files beside this one."""
