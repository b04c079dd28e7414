#include "core/base/zbp_status.h"

const char *zbp_status_name(int status)
{
    switch (status) {
    case ZBP_OK:
        return "ZBP_OK";
    case ZBP_ENOMEM:
        return "ZBP_ENOMEM";
    case ZBP_EINVAL:
        return "ZBP_EINVAL";
    case ZBP_EOVERFLOW:
        return "ZBP_EOVERFLOW";
    case ZBP_ETORCH:
        return "ZBP_ETORCH";
    default:
        return "unknown status";
    }
}
