/* test.h - what every unit test includes: cmocka with its prerequisites. */
#ifndef AFF_TEST_H
#define AFF_TEST_H
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

/* Folder of the source tree's tests (golden data, corpora) and of the repository itself. */
#ifndef AFF_TESTS_DIR
#define AFF_TESTS_DIR "tests"
#endif
#ifndef AFF_SOURCE_DIR
#define AFF_SOURCE_DIR "."
#endif
#endif
