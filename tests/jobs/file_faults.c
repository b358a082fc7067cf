/* Preloaded into a process: kills it, or fails a write, at the n-th operation on files below a directory.
 *
 * faults_arm(directory, kill_at, torn, room): the kill_at-th operation (from 1; 0 never) ends the process with SIGKILL
 * before it happens, or with `torn` after half of a write's bytes. `room` is how many bytes can be written before the
 * disk is full (ENOSPC); negative for no limit. faults_count() is how many operations there were.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char directory[PATH_MAX];
static atomic_long num_operations, kill_at, room;
static int torn;

void faults_arm(const char *below, long at, int tear, long bytes) {
    strncpy(directory, below, sizeof directory - 1);
    num_operations = 0;
    kill_at = at;
    torn = tear;
    room = bytes;
}

long faults_count(void) { return num_operations; }

static int counts(const char *path) { return directory[0] && path && strncmp(path, directory, strlen(directory)) == 0; }

static int counts_file(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return counts(path);
}

static int is_due(void) { return ++num_operations == kill_at; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t written(int file, const void *data, size_t size, off_t at, int positioned) {
    ssize_t (*real_write)(int, const void *, size_t) = REAL(write);
    ssize_t (*real_pwrite)(int, const void *, size_t, off_t) = REAL(pwrite);
    if (counts_file(file)) {
        if (is_due()) {
            if (torn) positioned ? real_pwrite(file, data, size / 2, at) : real_write(file, data, size / 2);
            die();
        }
        if (room >= 0) {
            if (room == 0) { errno = ENOSPC; return -1; }
            if ((long)size > room) size = room;
            room -= size;
        }
    }
    return positioned ? real_pwrite(file, data, size, at) : real_write(file, data, size);
}

ssize_t write(int file, const void *data, size_t size) { return written(file, data, size, 0, 0); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return written(file, data, size, at, 1); }
ssize_t pwrite64(int file, const void *data, size_t size, off_t at) { return written(file, data, size, at, 1); }

#define ON_FILE(name)                                                                                                   \
    int name(int file) {                                                                                                \
        if (counts_file(file) && is_due()) die();                                                                       \
        return REAL(name)(file);                                                                                        \
    }
ON_FILE(fsync)
ON_FILE(fdatasync)

#define ON_TRUNCATE(name)                                                                                               \
    int name(int file, off_t size) {                                                                                    \
        if (counts_file(file) && is_due()) die();                                                                       \
        return REAL(name)(file, size);                                                                                  \
    }
ON_TRUNCATE(ftruncate)
ON_TRUNCATE(ftruncate64)

int rename(const char *from, const char *to) {
    if ((counts(from) || counts(to)) && is_due()) die();
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    if (counts(path) && is_due()) die();
    return REAL(unlink)(path);
}

#define ON_OPEN(name)                                                                                                   \
    int name(const char *path, int flags, ...) {                                                                        \
        va_list list;                                                                                                   \
        va_start(list, flags);                                                                                          \
        mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;                                                       \
        va_end(list);                                                                                                   \
        if (flags & O_CREAT && counts(path) && is_due()) die();                                                         \
        return REAL(name)(path, flags, mode);                                                                           \
    }
ON_OPEN(open)
ON_OPEN(open64)

#define ON_OPENAT(name)                                                                                                 \
    int name(int folder, const char *path, int flags, ...) {                                                            \
        va_list list;                                                                                                   \
        va_start(list, flags);                                                                                          \
        mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;                                                       \
        va_end(list);                                                                                                   \
        if (flags & O_CREAT && counts(path) && is_due()) die();                                                         \
        return REAL(name)(folder, path, flags, mode);                                                                   \
    }
ON_OPENAT(openat)
ON_OPENAT(openat64)
