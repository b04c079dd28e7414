/* zbp_error.h - what a function of the shim that runs without the GIL has raised. */
#ifndef ZBP_ERROR_H
#define ZBP_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/* Held by the caller; zeroed is none. What it keeps is freed by zbp_error_clear, or when it is raised as a
 * Python error. */
typedef struct zbp_error {
    void *raised;
} zbp_error;

void zbp_error_clear(zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
