# What a path may be called: names that make and the shell both take as they stand. make parts targets at white space and at
# some other characters, whatever quotes are around them, so such a path is refused before anything is written.

hash := \#
# Joined by white space, which no path may have either.
UNFIT := ' " ` ( ) { } [ ] < > & | ; : , = ! ? * % $$ $(hash) ~ ^ \ #
NAMES := RUNS DATA VENV PYTHON CORPUS PAIR TABLE SUMS LIBRARY

# $(call unfit,path): the characters, and white space, for which it is refused.
unfit = $(strip $(foreach one,$(UNFIT),$(if $(findstring $(one),$(1)),$(one))) $(if $(filter 1,$(words x$(1)x)),,space))
$(foreach name,$(NAMES),$(if $(call unfit,$(value $(name))),$(error $(name)=$(value $(name)) has $(call unfit,$(value $(name))) in it, which make cannot take in the name of a file; expected letters, digits and / . _ - + @. Rename the folder, or link to it: ln -s "the folder" another)))
$(foreach name,$(NAMES),$(if $(filter -%,$(value $(name))),$(error $(name)=$(value $(name)) begins with a -, as an option does; write ./$(value $(name)))))
$(foreach name,RUNS VENV,$(if $(and $(filter-out undefined,$(origin $(name))),$(if $($(name)),,empty)),$(error $(name)= is empty; expected a folder)))
