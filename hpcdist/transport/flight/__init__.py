"""The flight recorder: the last operations of each rank, in mapped files.

`recorder` writes them, `call_site` finds the line of the program, `python_recorder` is what is done
where the compiled recorder is missing. For readers, `layout` says how a file is laid out, `rings`
where the files are and whose processes live, `recording` what one of them says, `analysis` who
waits for whom; `neighbours` asks all that for the ranks of this node.
"""
