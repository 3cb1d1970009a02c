/* Calls that change files, preloaded before the C library's: one of them fails, or is the process's last.

   `fault_at` counts them from 0; -1: none fails. `fault_number` is the error; 0: the process is killed; -1: a write takes
   the half of its bytes. Each call is a line of the file `fault_log`, if that is no -1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

int fault_at = -1, fault_count = 0, fault_number = 0, fault_log = -1;

static void note(const char *call, const char *path, const char *other) {
    char line[2048];
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\n", call, path, other);
    if (fault_log >= 0) syscall(SYS_write, fault_log, line, length);
}

static const char *path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static const char *path_at(int at, const char *name, char *path, size_t size) {
    if (at == AT_FDCWD || name[0] == '/') return name;
    path_of(at, path, size);
    size_t length = strlen(path);
    snprintf(path + length, size - length, "/%s", name);
    return path;
}

static int fails(const char *call, const char *path, const char *other) {
    note(call, path, other);
    if (fault_at < 0 || fault_count++ != fault_at || fault_number < 0) return 0;
    if (!fault_number) syscall(SYS_kill, getpid(), SIGKILL);
    errno = fault_number;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CALL(name, parameters, path, other, arguments)              \
    int name parameters {                                           \
        return fails(#name, path, other) ? -1 : NEXT(name) arguments; \
    }

CALL(rename, (const char *from, const char *to), from, to, (from, to))
CALL(renameat2, (int a, const char *from, int b, const char *to, unsigned flags), from, to, (a, from, b, to, flags))
CALL(mkdir, (const char *path, mode_t mode), path, "", (path, mode))
CALL(mkdirat, (int at, const char *path, mode_t mode), path, "", (at, path, mode))
CALL(link, (const char *from, const char *to), from, to, (from, to))
CALL(linkat, (int a, const char *from, int b, const char *to, int flags), from, to, (a, from, b, to, flags))
CALL(unlink, (const char *path), path, "", (path))
CALL(unlinkat, (int at, const char *path, int flags), path_at(at, path, (char[2048]){}, 2048), "", (at, path, flags))
CALL(rmdir, (const char *path), path, "", (path))
CALL(chmod, (const char *path, mode_t mode), path, "", (path, mode))

#define OPEN(name, before, fd, path)                                                    \
    int name(before const char *path, int flags, ...) {                                 \
        va_list rest;                                                                   \
        va_start(rest, flags);                                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;         \
        va_end(rest);                                                                   \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails("open", path, "")) return -1; \
        return NEXT(name)(fd path, flags, mode);                                        \
    }
#define COMMA ,
OPEN(open, , , path)
OPEN(open64, , , path)
OPEN(openat, int at COMMA, at COMMA, path)
OPEN(openat64, int at COMMA, at COMMA, path)

#define ON_FILE(name, call, result, parameters, fd, arguments)                \
    result name parameters {                                                  \
        char path[1024];                                                      \
        path_of(fd, path, sizeof path);                                       \
        return path[0] == '/' && fails(call, path, "") ? -1 : NEXT(name) arguments; \
    }
ON_FILE(fsync, "fsync", int, (int fd), fd, (fd))
ON_FILE(ftruncate64, "truncate", int, (int fd, off64_t size), fd, (fd, size))
ON_FILE(ftruncate, "truncate", int, (int fd, off_t size), fd, (fd, size))
ON_FILE(copy_file_range, "write", ssize_t,
        (int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags), to, (from, a, to, b, size, flags))
ON_FILE(sendfile64, "write", ssize_t, (int to, int from, off64_t *at, size_t size), to, (to, from, at, size))

ssize_t write(int fd, const void *data, size_t size) {
    char path[1024];
    path_of(fd, path, sizeof path);
    int last = fault_number == -1 && fault_count == fault_at;
    if (path[0] == '/' && fails("write", path, "")) return -1;
    return NEXT(write)(fd, data, last ? (size + 1) / 2 : size);
}
