# Builds forge_run with any gcc or clang: `make`, or `make CC=clang CFLAGS=-O2`.
# Products are not fused with sums, so that every machine computes the same.

CFLAGS = -O3 -march=native
SOURCES = forge_run.c plain.c avx2.c
HEADERS = json.h entropy.h tokenizer.h unicode.h weights.h network.h linear.h step.h

forge_run: $(SOURCES) $(HEADERS)
	$(CC) $(CFLAGS) -std=c99 -ffp-contract=off -Wno-psabi -o $@ $(SOURCES) -lm

clean:
	rm -f forge_run

.PHONY: clean
