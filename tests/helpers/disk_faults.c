/* Lets a disk fail below Python: loaded with LD_PRELOAD, it counts what processes write under a folder, and fails,
 * delays or shortens some of it.
 *
 * What is to happen is in a file that every process maps (SHOAL_DISK_FAULTS names it), so that one fork server can
 * serve many runs, and so that writes of all processes are counted together. `disk_faults.py` has the same layout.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum action { PASS = 0, FAIL = 1, DELAY = 2, SHORTEN = 3 };

struct control {
    int64_t seen;    /* matching operations so far, of all processes */
    int64_t fired;   /* of these, how many were failed, delayed or shortened */
    int64_t first;   /* the first one to strike, from 1; 0: none */
    int64_t last;    /* the last one */
    int32_t action;
    int32_t error;   /* errno, where it fails */
    double delay_s;
    int32_t traces;  /* whether to log what passes, too */
    int32_t unused;
    char prefix[1024];   /* only paths that begin so; empty: nothing at all */
    char contains[256];  /* and that contain this */
    char operations[256];/* and only these: " write pwrite "; empty: all */
    char log[1024];      /* a line for each: number, action, operation, path */
};

static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SHOAL_DISK_FAULTS");
    int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (found != MAP_FAILED)
        control = found;
}

static void note(int64_t number, const char *what, const char *operation, const char *path) {
    char line[4096];
    int length = snprintf(line, sizeof line, "%lld %s %s %s\n", (long long)number, what, operation, path);
    int fd = syscall(SYS_openat, AT_FDCWD, control->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
        syscall(SYS_write, fd, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
        syscall(SYS_close, fd);
    }
}

/* What is to become of this operation; PASS where it is none of ours. */
static enum action judge(const char *operation, const char *path) {
    if (!control || !control->prefix[0] || strncmp(path, control->prefix, strlen(control->prefix)))
        return PASS;
    if (control->contains[0] && !strstr(path, control->contains))
        return PASS;
    if (control->operations[0]) {
        char word[64];
        snprintf(word, sizeof word, " %s ", operation);
        if (!strstr(control->operations, word))
            return PASS;
    }
    int before = errno;
    int64_t number = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST);
    enum action action = control->first && number >= control->first && number <= control->last
        ? (enum action)control->action : PASS;
    static const char *const words[] = {"passed", "failed", "delayed", "shortened"};
    if (action != PASS)
        __atomic_add_fetch(&control->fired, 1, __ATOMIC_SEQ_CST);
    if (action != PASS || control->traces)
        note(number, words[action], operation, path);
    errno = before;
    if (action == DELAY) {
        struct timespec left = {(time_t)control->delay_s, (long)((control->delay_s - (time_t)control->delay_s) * 1e9)};
        while (nanosleep(&left, &left) && errno == EINTR) {}
        errno = before;
        return PASS;
    }
    if (action == FAIL)
        errno = control->error;
    return action;
}

static enum action judge_fd(const char *operation, int fd) {
    if (!control || !control->prefix[0])
        return PASS;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int before = errno;
    ssize_t length = readlink(name, path, sizeof path - 1);
    errno = before;
    if (length <= 0)
        return PASS;
    path[length] = 0;
    return judge(operation, path);
}

static enum action judge_path(const char *operation, const char *path) {
    if (!control || !control->prefix[0] || path[0] != '/')
        return PASS; /* runs name their files in full */
    return judge(operation, path);
}

#define OPEN(name, declaration, call)                                                       \
    int name declaration {                                                                  \
        mode_t mode = 0;                                                                    \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                \
            va_list rest;                                                                   \
            va_start(rest, flags);                                                          \
            mode = va_arg(rest, mode_t);                                                    \
            va_end(rest);                                                                   \
        }                                                                                   \
        int (*real) declaration = (int (*) declaration)dlsym(RTLD_NEXT, #name);             \
        if ((flags & O_CREAT) && judge_path("open", path) == FAIL)                          \
            return -1;                                                                      \
        return real call;                                                                   \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPEN(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))

#define WRITE(name, operation, declaration, shorter, call)                                  \
    ssize_t name declaration {                                                              \
        ssize_t (*real) declaration = (ssize_t (*) declaration)dlsym(RTLD_NEXT, #name);     \
        enum action action = judge_fd(operation, fd);                                       \
        if (action == FAIL)                                                                 \
            return -1;                                                                      \
        if (action == SHORTEN)                                                              \
            shorter;                                                                        \
        return real call;                                                                   \
    }

#define HALF if (count > 1) count /= 2
WRITE(write, "write", (int fd, const void *data, size_t count), HALF, (fd, data, count))
WRITE(pwrite, "pwrite", (int fd, const void *data, size_t count, off_t at), HALF, (fd, data, count, at))
WRITE(pwrite64, "pwrite", (int fd, const void *data, size_t count, off64_t at), HALF, (fd, data, count, at))
WRITE(writev, "writev", (int fd, const struct iovec *parts, int count), HALF, (fd, parts, count))

#define FILE_CALL(name, declaration, call)                                                  \
    int name declaration {                                                                  \
        int (*real) declaration = (int (*) declaration)dlsym(RTLD_NEXT, #name);             \
        return judge_fd(#name, fd) == FAIL ? -1 : real call;                                \
    }

FILE_CALL(fsync, (int fd), (fd))
FILE_CALL(fdatasync, (int fd), (fd))
FILE_CALL(ftruncate, (int fd, off_t length), (fd, length))
FILE_CALL(ftruncate64, (int fd, off64_t length), (fd, length))

#define PATH_CALL(name, operation, declaration, named, call)                                \
    int name declaration {                                                                  \
        int (*real) declaration = (int (*) declaration)dlsym(RTLD_NEXT, #name);             \
        return judge_path(operation, named) == FAIL ? -1 : real call;                       \
    }

PATH_CALL(rename, "rename", (const char *from, const char *to), to, (from, to))
PATH_CALL(renameat, "rename", (int a, const char *from, int b, const char *to), to, (a, from, b, to))
PATH_CALL(mkdir, "mkdir", (const char *path, mode_t mode), path, (path, mode))
PATH_CALL(mkdirat, "mkdir", (int folder, const char *path, mode_t mode), path, (folder, path, mode))
PATH_CALL(unlink, "unlink", (const char *path), path, (path))
